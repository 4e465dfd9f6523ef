"""From tokens to samples: shuffling, packing, blending."""

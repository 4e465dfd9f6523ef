"""How several processes train one model: their places, the mesh of devices, shards, launcher."""

"""The pages of runs: `report.html` of one, and the comparison of several. Does not import torch."""

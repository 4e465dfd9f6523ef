"""What a run will take, before it runs: memory by closed forms, time by a roofline, and what would make it fit."""

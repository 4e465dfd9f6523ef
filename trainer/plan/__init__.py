"""Estimate memory (closed forms) and step time (roofline) of a run in advance, and find settings that fit."""

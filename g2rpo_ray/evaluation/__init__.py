"""Judging weights: pictures from fixed seeds, every reward, intervals, differences, a gallery."""

"""Z-Image: base, and Turbo, which was distilled from it."""

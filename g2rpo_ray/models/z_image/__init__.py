"""Z-Image: base and Turbo."""

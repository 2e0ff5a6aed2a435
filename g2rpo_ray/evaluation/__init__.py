"""``g2rpo evaluate``: weights compared on held-out prompts: draw, statistics, table, gallery."""

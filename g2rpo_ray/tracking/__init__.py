"""What a run leaves behind: metrics, progress, peak memory and the report."""

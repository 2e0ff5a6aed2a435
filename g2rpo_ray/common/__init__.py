"""The ground of every room: errors, logs, paths, the base of settings, text files."""

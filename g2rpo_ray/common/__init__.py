"""Ground: errors, logs, paths, the base of settings, text files; knows no other room."""

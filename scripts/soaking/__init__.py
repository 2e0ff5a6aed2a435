"""What ``scripts/soak.py`` is made of: a cluster, faults, a judge that fails, what is watched."""

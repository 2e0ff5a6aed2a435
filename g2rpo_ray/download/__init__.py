"""``g2rpo download``: the models that a configuration names, from the hub into its folders."""

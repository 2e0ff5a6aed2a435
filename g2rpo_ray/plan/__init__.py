"""``g2rpo plan``: memory, time and the best split of GPUs, predicted from measured costs."""

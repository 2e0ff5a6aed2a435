"""``g2rpo demo``: a page on which people draw with a run's weights; Gradio in ``page`` alone."""

"""``report.html``: what a person reads about a run, drawn from its folder."""

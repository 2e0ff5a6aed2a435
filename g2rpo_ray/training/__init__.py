"""``g2rpo train``: the algorithm's loop, the roles that it calls, evaluation beside it."""

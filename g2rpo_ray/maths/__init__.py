"""The formulas: schedules, SDE steps, grids, advantages, objective, noise; pure torch.

Flow-model convention of every module here: ``x_t = (1 - t) * x_0 + t * noise`` with the velocity
``v = noise - x_0``; sigma (= t) runs from 1 (noise) down to 0 (picture).
"""

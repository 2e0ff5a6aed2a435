"""Pictures without Ray: sampler, evaluator, engine, and the group that goes to the learner."""

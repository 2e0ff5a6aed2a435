"""Drawing pictures without Ray: sampler, evaluator, engine, and the group that the learner gets."""

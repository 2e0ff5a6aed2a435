"""Ray workers that draw groups, and the pool that keeps them busy and replaces them."""

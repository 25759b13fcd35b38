"""The OpenRLHF engine: Ray, DeepSpeed and vLLM."""

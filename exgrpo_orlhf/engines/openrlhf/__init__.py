"""OpenRLHF on Ray, DeepSpeed and vLLM."""

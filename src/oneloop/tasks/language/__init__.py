"""Language models: chat templates, packing, LoRA, and a loss that never stores all logits."""

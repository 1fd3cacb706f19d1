"""Language models: chat templates, packed documents, a loss without the logits."""

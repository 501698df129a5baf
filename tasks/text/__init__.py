"""Classification of texts with BERT-style models: data, model, loss and metrics."""

"""Tasks: model, data, loss and metrics behind the interface of `tasks.interface`; they know no backend."""

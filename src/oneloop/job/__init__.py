"""Build what a recipe describes (task, model, optimizer, data order) and check it before anything
is written."""

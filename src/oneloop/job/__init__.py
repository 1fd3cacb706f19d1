"""Build what a recipe describes (task, model, optimizer, data order), and check it.

All of it happens before anything is written.
"""

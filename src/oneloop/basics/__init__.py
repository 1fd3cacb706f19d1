"""Small tools for several packages; they import nothing else from oneloop."""

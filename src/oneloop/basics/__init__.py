"""Small tools that several rooms need; they import nothing else of oneloop."""

"""How the small models that lie in the repository were made; not part of the library."""

"""References of routers of experts, of rows sorted by expert, and of products of such rows."""

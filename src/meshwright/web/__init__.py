"""The server of the page: routes, safety checks, and worker processes that compute the answers."""

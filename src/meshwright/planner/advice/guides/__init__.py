"""The usual rules of thumb for choosing a parallel plan, each as a function, and what following it costs."""

"""The monitoring daemon of a GPU node: collect, evaluate, alert, show."""

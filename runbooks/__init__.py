"""One page a rule, `<rule id>.md`: what it means, how to confirm it, what to do."""

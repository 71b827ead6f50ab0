# Completions of kolo for fish, from the kolo in PATH.
kolo completions fish | source

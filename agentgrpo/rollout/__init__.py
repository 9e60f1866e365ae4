"""Playing groups of rollouts, and what each turn adds in tokens."""

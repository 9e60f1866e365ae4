"""Hidden tests in a second session: the code under test cannot forge a verdict."""

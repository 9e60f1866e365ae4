"""The API of E2B, implemented on local sessions."""

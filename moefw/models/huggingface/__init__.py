"""Models of Hugging Face: what their ``config.json`` says in a spec, and where their files hold our parameters."""

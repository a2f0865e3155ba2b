"""What a helper does: calls that depend on plan and arguments alone, so that another helper can do them again."""

"""What is known of the published SGLang releases, and only that."""

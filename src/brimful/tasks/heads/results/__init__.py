"""What a sweep found: figures of each run, what they say over seeds, and the tables and files made of them."""

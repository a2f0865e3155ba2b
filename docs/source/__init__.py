"""What of docs/ is made and not written: the reference, the pictures of orders, the site."""

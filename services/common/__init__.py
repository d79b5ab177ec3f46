"""Code shared by the services; it never imports one of them."""

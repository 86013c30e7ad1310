"""What plugin authors and our own tests share: problems, the dense oracle, a pool of gloo ranks."""

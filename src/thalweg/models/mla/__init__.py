"""The MLA family (DeepSeek-V3, R1, Kimi K2) over the operations: dense latent attention on paged caches, absorbed."""

"""Flash attention for Hopper (sm_90) in Gluon: TMA loads, one producer warp group, two or three consumers of wgmma."""

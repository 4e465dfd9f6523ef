"""Flash attention for Hopper (sm_90) in Gluon: TMA loads, one producer warp group, two consumers of wgmma."""

"""Hand-written HLO: an all-reduce that starts and ends, and computations to put between."""

HEAD = """HloModule hand, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %r = f32[] add(%a, %b)
}

%product (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %q = f32[8,8] parameter(1)
  %d = f32[8,8] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %e = f32[8,8] add(%d, %p)
}

%wrapped (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %q = f32[8,8] parameter(1)
  ROOT %f = f32[8,8] fusion(%p, %q), kind=kOutput, calls=%product
}

%twice (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %q = f32[8,8] parameter(1)
  ROOT %e = f32[8,8] add(%p, %q)
}

%turned (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %q = f32[8,8] parameter(1)
  %c = s32[] constant(1)
  %i = s32[] add(%c, %c)
  %s = f32[1,8] dynamic-slice(%p, %i, %c), dynamic_slice_sizes={1,8}
  ROOT %e = f32[8,8] transpose(%q), dimensions={1,0}
}

%scatter (p: f32[8,8]) -> f32[1,8] {
  %p = f32[8,8] parameter(0)
  ROOT %rs = f32[1,8] reduce-scatter(%p), GROUPS, dimensions={0}, to_apply=%sum
}

%body (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p = (s32[], f32[8,8]) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %m = f32[8,8] get-tuple-element(%p), index=1
  %e = f32[8,8] add(%m, %m)
  ROOT %t = (s32[], f32[8,8]) tuple(%n, %e)
}

%idle (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  ROOT %p = (s32[], f32[8,8]) parameter(0)
}

%go (p: (s32[], f32[8,8])) -> pred[] {
  %p = (s32[], f32[8,8]) parameter(0)
  ROOT %t = pred[] constant(false)
}
"""
GROUPS = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"
START = f"%s = f32[8,8] all-reduce-start(%x), {GROUPS}, to_apply=%sum"
DONE = "%d = f32[8,8] all-reduce-done(%s)"


def hand(*lines, head=HEAD, extra=""):
    entry = ["ENTRY %main (x: f32[8,8]) -> f32[8,8] {", "%x = f32[8,8] parameter(0)", *lines]
    text = "\n  ".join([*entry, "ROOT %end = f32[8,8] copy(%x)"])
    return head.replace("GROUPS", GROUPS) + extra + text + "\n}\n"

-- Operations in flight, per node in recorded order; entries without a record are dropped.
-- KEYS  1 prefix
-- ARGV  1 node or ''  2 limit per node
-- Returns rows {op id, field, value…}
local rows = {}
local nodes = A[1] ~= '' and { A[1] } or call('SMEMBERS', P .. 'nodes')
for _, node in ipairs(nodes) do
  local inflight = P .. 'inflight:' .. node
  for _, id in ipairs(call('ZRANGE', inflight, 0, A[2] - 1)) do
    local fields = call('HGETALL', P .. 'op:' .. id)
    if #fields == 0 then
      call('ZREM', inflight, id)
    else
      rows[#rows + 1] = { id, unpack(fields) }
    end
  end
end
return rows

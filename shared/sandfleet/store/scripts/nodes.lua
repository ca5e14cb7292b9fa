-- Every known node.
-- KEYS  1 prefix
-- Returns a list of {node, lease holder or '', places, creating, stopping, warm, {sandbox, warm since ms, …} longest
-- idle first, inflight, field, value…}
--@use time
local ms = now_ms()
local out = {}
for _, node in ipairs(call('SMEMBERS', P .. 'nodes')) do
  local fields = call('HGETALL', P .. 'node:' .. node)
  if #fields == 0 then
    call('SREM', P .. 'nodes', node)
  else
    out[#out + 1] = { node, call('GET', P .. 'lease:' .. node) or '',
      call('ZCOUNT', P .. 'places:' .. node, '(' .. ms, '+inf'),
      call('ZCOUNT', P .. 'places:' .. node, '(' .. ms, '(+inf'),
      call('ZCOUNT', P .. 'stopping:' .. node, '(' .. (ms - 30000), '+inf'), call('ZCARD', P .. 'warm:' .. node),
      call('ZRANGE', P .. 'warm:' .. node, 0, 31, 'WITHSCORES'),
      call('ZCARD', P .. 'inflight:' .. node), unpack(fields) }
  end
end
return out

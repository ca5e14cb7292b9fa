-- Every known node.
-- KEYS  1 prefix
-- Returns a list of {node, lease holder or '', places, warm, inflight, field, value…}
--@use time
local ms = now_ms()
local out = {}
for _, node in ipairs(call('SMEMBERS', P .. 'nodes')) do
  local fields = call('HGETALL', P .. 'node:' .. node)
  if #fields == 0 then
    call('SREM', P .. 'nodes', node)
  else
    out[#out + 1] = { node, call('GET', P .. 'lease:' .. node) or '',
      call('ZCOUNT', P .. 'places:' .. node, '(' .. ms, '+inf'), call('ZCARD', P .. 'warm:' .. node),
      call('ZCARD', P .. 'inflight:' .. node), unpack(fields) }
  end
end
return out

-- Whether anybody is in a sandbox: an unexpired agent or operation.
local function has_ops(sid, ms)
  return call('ZCOUNT', P .. 'busy:' .. sid, '(' .. ms, '+inf') > 0
end

local function in_use(sid, ms)
  return call('ZCOUNT', P .. 'agents:' .. sid, '(' .. ms, '+inf') > 0 or has_ops(sid, ms)
end

-- A live sandbox with nobody in it is warm; true if it became so now. It may be evicted, so the line hears of it.
local function settle(sid, route, ms)
  if in_use(sid, ms) then return false end
  local sb = call('HMGET', P .. 'sandbox:' .. sid, 'state', 'route')
  if sb[1] ~= 'live' or sb[2] ~= route then return false end
  local _, node = split(route)
  if call('ZADD', P .. 'warm:' .. node, 'NX', ms, sid) == 0 then return false end
  keep(P .. 'warm:' .. node, KEEP)
  kick(ms)
  return true
end
